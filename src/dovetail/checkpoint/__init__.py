"""The sharded checkpoint format."""

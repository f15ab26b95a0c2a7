"""The sharded checkpoint format: every rank's pieces beside one manifest that says what they are and how to trust them."""

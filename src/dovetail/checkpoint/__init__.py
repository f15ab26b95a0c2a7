"""The sharded checkpoint format: every rank's pieces beside one manifest that says what and where they are."""

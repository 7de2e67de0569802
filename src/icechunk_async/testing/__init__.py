"""What tests of this library, and of other people's backends, are built from."""

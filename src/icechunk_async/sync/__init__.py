"""The blocking facade."""

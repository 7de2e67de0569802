"""Undo, restore, merge: the room `engine/versions`."""

"""Golden repositories and the script that makes them."""

"""Virtual chunks: which sources may be read, and reading them."""

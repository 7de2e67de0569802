"""The gateway read by programs of others, and its pages by a browser. Needs tox's `gateway`."""

"""A repository as a whole: settings, copies, integrity, and what is kept for how long."""

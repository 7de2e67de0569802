"""An object server that keeps every promise, and its client: to try tests of servers on."""

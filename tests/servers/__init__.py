"""Backends on real servers, which the tests start on loopback and stop."""

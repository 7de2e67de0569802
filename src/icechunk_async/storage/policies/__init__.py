"""Policies around a storage, one wrapper each; `stack` says how they are put together."""

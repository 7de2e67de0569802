"""Policies around a storage, one wrapper each; `stack` defines their order."""

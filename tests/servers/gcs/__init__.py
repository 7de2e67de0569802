"""The gcs backend on its servers."""

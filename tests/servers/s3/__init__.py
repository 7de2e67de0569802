"""The s3 backend on its servers."""

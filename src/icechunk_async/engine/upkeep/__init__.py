"""Keep a repository healthy: collect, check, compact, measure, rewrite, migrate, inspect."""

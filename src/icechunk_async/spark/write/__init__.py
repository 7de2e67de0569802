"""Write rows and computed chunks to arrays: many tasks, one commit."""

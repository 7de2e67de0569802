"""From changes to a published snapshot: flush, publish, rebase, settle conflicts."""

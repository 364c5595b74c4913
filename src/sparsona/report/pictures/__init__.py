"""Pictures of one run or one partition."""

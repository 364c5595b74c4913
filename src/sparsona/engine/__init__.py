"""Who does what when: turns, executors, rounds with a server, evaluation. Methods are handed in, never imported."""

"""What the papers' theorems say of a run: constants estimated from its models, bounds beside what was measured."""

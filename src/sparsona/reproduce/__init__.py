"""The papers' tables and figures: one recipe (TOML) each, and what runs them."""

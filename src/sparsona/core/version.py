"""The version of this package, where every room can read it."""

VERSION = "0.2.0.dev0"

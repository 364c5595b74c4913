"""The version of this package, where every subpackage can import it."""

VERSION = "0.2.0.dev0"

"""The version, read by the build and by everything that says who it is."""

VERSION = "0.1.0"

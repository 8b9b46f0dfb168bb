"""Tests of the package, of its pages and of its commands."""

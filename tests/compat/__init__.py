"""Tests of the alias; the fixture `alias` installs it for a test."""

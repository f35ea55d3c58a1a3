"""Importing it fails, in one line, where another module stands in the way of one of the product's."""

from deploy.installation import foreign_module

if (_foreign := foreign_module()) is not None:
    raise ImportError(_foreign)

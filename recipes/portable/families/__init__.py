"""Which tensor of a model folder is which of ours, family by family. No torch here."""

from recipes.portable.families.family import Family, Place, SpecialIds
from recipes.portable.families.select import family_of

__all__ = ["Family", "Place", "SpecialIds", "family_of"]

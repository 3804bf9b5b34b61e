"""ModelNames that LoRAX keeps here and callers of a padded batch import from here."""

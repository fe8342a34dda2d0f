"""Where gradients come from, and where they are cut off."""

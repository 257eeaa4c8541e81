"""How the bundled checkpoint (engine/bundled) was trained."""

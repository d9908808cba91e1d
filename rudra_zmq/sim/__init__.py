"""Virtual time over the rules of core: what a protocol would do with so many learners of such speeds."""

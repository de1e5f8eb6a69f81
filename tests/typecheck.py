"""How annotations are checked while tests run: an int may stand for a float, as in plain Python."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

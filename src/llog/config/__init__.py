"""Every setting, declared once: its name, type, bounds, default and description.

`stores.py`, `upkeep.py`, `segments.py`, `broker.py`, `kafka.py` and `monitoring.py` declare the settings, one adding to
the one before; `settings.py` completes the values and checks them against each other; `declaration.py` reads the
declarations; `locations.py` decides which of several settings names a store; `loading.py` finds the values.
"""

from llog.base.secret import Secret as Secret
from llog.config.declaration import Setting as Setting
from llog.config.settings import SETTINGS as SETTINGS
from llog.config.settings import Settings as Settings
from llog.config.settings import parse_targets as parse_targets

"""SMAC's battles on the accelerator: scenarios and rules as data, mechanics in pure JAX."""

from .env import BattleEnv as BattleEnv
from .maps import SCENARIOS as SCENARIOS
from .maps import AttackMove as AttackMove
from .maps import Hold as Hold
from .maps import Hunt as Hunt
from .maps import Scenario as Scenario
from .maps import Spawn as Spawn
from .options import Options as Options
from .terrain import Terrain as Terrain
from .units import SIM_VERSION as SIM_VERSION
from .units import UNITS as UNITS
from .units import Rules as Rules
from .units import UnitType as UnitType

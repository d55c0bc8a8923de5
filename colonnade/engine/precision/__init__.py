"""Mixed precision: what is computed, kept, reduced and stepped on in which dtype."""

from colonnade.engine.precision.float8 import Float8 as Float8
from colonnade.engine.precision.policy import Precision as Precision
from colonnade.engine.precision.scaler import LossScaler as LossScaler
from colonnade.engine.precision.table import PrecisionTable as PrecisionTable
from colonnade.engine.precision.table import precision_table as precision_table

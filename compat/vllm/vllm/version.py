"""The version of the interface; the part behind + is Octavo's."""

import octavo

__version__ = f"0.32.0+octavo.{octavo.__version__}"
__version_tuple__ = (0, 32, 0, f"octavo.{octavo.__version__}")

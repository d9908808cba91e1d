"""The head: messages in, effects out. Who may say what, and the answer to every request.

Owns authentication and the requests of the command line. Must not know: sockets and processes; time is an argument
(monotonic seconds). The course of a job is course's, learners are crew's, hosts are fleet's, keys are keydesk's.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pwd
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from rudra_zmq import __version__, log
from rudra_zmq.config import job_from_toml
from rudra_zmq.core import job as life
from rudra_zmq.errors import ConfigError, NotFound, NotRunning, RefusedBySecurity, Rejected, RudraError
from rudra_zmq.head import bundles, files
from rudra_zmq.head.course import HUNG_S, Course
from rudra_zmq.head.crew import MOVE_S
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.figures import Figure, figures
from rudra_zmq.head.fleet import Fleet, Host
from rudra_zmq.head.jobs import MOST_LISTED, Book, Job, wanted_of
from rudra_zmq.head.keydesk import KeyDesk
from rudra_zmq.head.keyring import HERE, Grade, Keyring, Origin, allows, local_grade
from rudra_zmq.head.placement import admit
from rudra_zmq.head.reasons import Limits, Reasons

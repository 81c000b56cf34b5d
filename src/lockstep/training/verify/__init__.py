"""Does this training compute on N replicas what it computes on one device? ``lockstep verify`` finds out by trying."""

from lockstep.training.verify.causes import CAUSES, Cause
from lockstep.training.verify.comparison import Comparison
from lockstep.training.verify.subject import Subject
from lockstep.training.verify.verdict import Verdict, verify

__all__ = ["CAUSES", "Cause", "Comparison", "Subject", "Verdict", "verify"]

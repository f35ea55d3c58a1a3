"""Text at the router: the only place where it exists. Everything behind it speaks token ids.

    text or chat --Tokenizer--> prompt ids ... output ids --Detokenizer--> text --StopStrings--> what the client sees

A Detokenizer and a StopStrings belong to one sequence and are functions of the ids pushed so far: fresh ones fed with
the ids accepted by earlier attempts stand where the old ones stood.
"""

from router.text.chat_template import ROLES, ChatMessage
from router.text.detokenizer import Detokenizer, TokenText
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer

__all__ = ["ROLES", "ChatMessage", "Detokenizer", "StopStrings", "TokenText", "Tokenizer"]

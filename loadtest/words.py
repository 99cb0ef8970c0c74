"""Text of a requested length in tokens, the same for the same name.

The words are such that most tokenizers make one token of a space and one of them; the server's own count of a
prompt's tokens is in the report.
"""

import random

_ALL = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education foot boy age policy process music market sense nation plan college interest death
experience effect use class control care field development role effort rate heart drug show leader
light voice wife police mind price report decision son view relationship town road arm difference
value building action season society tax director position player record paper space ground form
event official matter center couple site project activity star table need court oil situation cost
industry figure street image phone data picture practice piece land product doctor wall worker news
test movie north love support technology step baby computer type attention film tree source hair
look window culture chance brother energy period course summer plant opportunity term letter
condition choice rule daughter south husband floor campaign material population call economy
hospital church risk fire future bank second rest stone river bridge garden bread wind ship clock
winter spring green blue red white black small large long short old new good
"""
WORDS = tuple(_ALL.split())


def text_of(name: str, num_words: int) -> str:
    """`num_words` words, a space before each. A shorter text of the same name is the start of a longer."""
    return "".join(f" {word}" for word in random.Random(name).choices(WORDS, k=num_words))

"""The contracts: every message, subject, stream, bucket and key that DSec's parts share.

Pure values. A receiver ignores fields it does not know (an older reader tolerates additions);
a change that is not additive is a new version beside the old one, never a change of meaning.
"""

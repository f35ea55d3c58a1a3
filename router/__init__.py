"""The front: takes requests, owns them until their terminal event, and places attempts on workers.

Pure: validation, membership, policies, dispatch, control, and generation, which makes text of an attempt's tokens with
the text package. Shell: frontend, sessions, server.
"""

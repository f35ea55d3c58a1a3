"""The front: takes requests, owns them until their terminal event, and places attempts on workers.

Pure: validation, membership, policies, dispatch. Text: the text package. Shell: frontend, sessions, server.
"""

"""The command line's conversations: answers, chats and tool round trips at the terminal."""

"""One form of a chat, between the APIs of clients and the formats that models write."""

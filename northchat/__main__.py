import sys

from northchat.cli import main

sys.exit(main())

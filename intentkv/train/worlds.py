"""The task families that generated traces are made in. Heads are trained on some and judged on another."""

import random
import string

from intentkv.train.generate import Thing, World

FIRST_NAMES = (
    *("Ada", "Bruno", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas"),
    *("Karin", "Leo", "Mona", "Nils", "Olga", "Pavel", "Rosa", "Sven", "Tilda", "Viktor"),
)
SURNAMES = (
    *("Aldermann", "Brecht", "Corvino", "Dahl", "Engström", "Falk", "Gruber", "Holm", "Ivarsen", "Jelinek"),
    *("Kowal", "Lindqvist", "Marek", "Novak", "Orsini", "Petrov", "Rask", "Santoro", "Thorne", "Wolff"),
)


def serial(draw: random.Random) -> str:
    """`KX-402`."""
    return f"{_letters(draw, 2)}-{draw.randrange(100, 1000)}"


def plate(draw: random.Random) -> str:
    """`7F19-QB`."""
    return f"{draw.randrange(10)}{_letters(draw, 1)}{draw.randrange(10, 100)}-{_letters(draw, 2)}"


def number(draw: random.Random) -> str:
    """Five digits."""
    return str(draw.randrange(10000, 100000))


def price(draw: random.Random) -> str:
    """`$1,240`."""
    return f"${draw.randrange(1000, 9999):,}"


def day(draw: random.Random) -> str:
    """`14 March`."""
    months = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")
    return f"{draw.randrange(1, 29)} {draw.choice(months)}"


def person(draw: random.Random) -> str:
    """A first name and a surname, out of 400 pairs."""
    return f"{draw.choice(FIRST_NAMES)} {draw.choice(SURNAMES)}"


def address(draw: random.Random) -> str:
    """`mona.falk@kelp.example`."""
    host = draw.choice(("kelp", "fennel", "basalt", "osprey", "juniper", "cobalt"))
    return f"{person(draw).lower().replace(' ', '.').replace('ö', 'o')}@{host}.example"


def _letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choice(string.ascii_uppercase) for _ in range(count))


HARBOUR = World(
    name="harbour",
    system="You are the clerk of a small harbour. Load the records you need and register values exactly as written.",
    load="load_record",
    act="register_value",
    record_argument="record",
    what_argument="item",
    value_argument="value",
    records=(
        "quay ledger",
        "pilot's notebook",
        "crane journal",
        "customs folder",
        "ferry timetable remarks",
        "buoy log",
    ),
    things=(
        Thing("seal of the banana container", serial),
        Thing("berth permit of the tall ship", serial),
        Thing("key tag of the tide gauge", serial),
        Thing("claim of the scratched hull", serial),
        Thing("hull number of the tugboat", plate),
        Thing("radio call sign of the pilot boat", plate),
        Thing("registration of the fish lorry", plate),
        Thing("customs file of the marble blocks", number),
        Thing("meter reading of the shore power", number),
        Thing("lottery ticket of the crew", number),
        Thing("mooring fee of the yacht", price),
        Thing("repair bill of the crane", price),
        Thing("deposit for the spare anchor", price),
        Thing("fine for the oil stain", price),
        Thing("inspection day of the lighthouse", day),
        Thing("departure of the training ship", day),
        Thing("captain of the dredger", person),
        Thing("diver who checks the lock gate", person),
        Thing("agent of the grain company", person),
        Thing("owner of the lost kayak", person),
    ),
    subjects=(
        *("The harbour master", "A gull", "The crew of the night ferry", "An old fisherman", "The crane driver"),
        *("Somebody from the yacht club", "The customs dog", "A tourist with a camera"),
    ),
    deeds=(
        *("watched the barges turn", "complained about the smell of diesel", "waited for the tide to rise"),
        *("coiled the long ropes on deck", "asked where the toilets were", "painted a railing in fresh white"),
        *(
            "carried two crates of ice to the cold store",
            "looked for a missing glove",
            "listened to the weather report",
        ),
    ),
    circumstances=(
        *(
            "while the fog was lifting",
            "before the cafe opened",
            "as on every other morning",
            "although it was raining",
        ),
        *(
            "until the bell rang twice",
            "next to the yellow bollard",
            "without saying much",
            "because the wind had turned",
        ),
    ),
)

FESTIVAL = World(
    name="festival",
    system="You run the office of an open-air festival. Fetch the sheets and enter each value just as the sheet has it.",
    load="fetch_sheet",
    act="enter",
    record_argument="sheet",
    what_argument="field",
    value_argument="entry",
    records=(
        "stage plan",
        "catering sheet",
        "volunteer roster",
        "security briefing",
        "ticket office memo",
        "sound check list",
    ),
    things=(
        Thing("pass of the drummer", serial),
        Thing("locker of the lighting crew", serial),
        Thing("tent pitch of the choir", serial),
        Thing("plug adapter of the main stage", serial),
        Thing("van of the puppet theatre", plate),
        Thing("trailer with the generators", plate),
        Thing("invoice of the pancake stall", number),
        Thing("guest list entry of the mayor", number),
        Thing("order of the rain ponchos", number),
        Thing("helpline of the lost property tent", number),
        Thing("fee of the headliner", price),
        Thing("rent of the meadow", price),
        Thing("damage to the wooden fence", price),
        Thing("sponsor money of the brewery", price),
        Thing("date of the fire inspection", day),
        Thing("rehearsal of the brass band", day),
        Thing("stage manager of the small tent", person),
        Thing("doctor on call at night", person),
        Thing("contact of the toilet company", address),
        Thing("manager of the flute quartet", address),
    ),
    subjects=(
        *("A volunteer in a red shirt", "The sound engineer", "The neighbour across the river", "The cook's assistant"),
        *("One of the jugglers", "The photographer", "A family with three children", "The night watch"),
    ),
    deeds=(
        *("rolled out another cable", "danced in front of the empty stage", "handed out paper maps"),
        *("washed a mountain of cups", "tuned the same guitar again", "put up a sign that pointed the wrong way"),
        *("fell asleep on a pile of coats", "tested the fog machine", "argued about the order of the songs"),
    ),
    circumstances=(
        *(
            "during the long break",
            "since the afternoon show was late",
            "to everybody's delight",
            "behind the ice cream van",
        ),
        *(
            "although nobody was listening",
            "as the sun went down",
            "for the third time that day",
            "until the rain stopped",
        ),
    ),
)

GREENHOUSE = World(
    name="greenhouse",
    system="You assist a botanical station. Open the notes that are asked for, and file each datum unchanged.",
    load="open_notes",
    act="file_datum",
    record_argument="notes",
    what_argument="subject",
    value_argument="datum",
    records=(
        "seed bank notes",
        "orchid house diary",
        "irrigation report",
        "pest survey",
        "herbarium register",
        "visitor book",
    ),
    things=(
        Thing("accession of the blue poppy", serial),
        Thing("label of the oldest cactus", serial),
        Thing("batch of the nematode treatment", serial),
        Thing("drawer of the moss collection", serial),
        Thing("sensor in the fern valley", plate),
        Thing("valve of the misting line", plate),
        Thing("catalogue entry of the giant lily", number),
        Thing("count of the germinated sequoias", number),
        Thing("parcel from the Kew exchange", number),
        Thing("price of the shading cloth", price),
        Thing("grant for the alpine house", price),
        Thing("quote for the glass panes", price),
        Thing("flowering of the corpse plant", day),
        Thing("sowing of the night jasmine", day),
        Thing("next spraying in the palm house", day),
        Thing("collector of the dwarf iris", person),
        Thing("student who counts the stomata", person),
        Thing("keeper of the bee hotel", person),
        Thing("sender of the mystery bulbs", address),
        Thing("referee of the lichen paper", address),
    ),
    subjects=(
        *("The head gardener", "A robin", "The apprentice with the green gloves", "The school group", "The old boiler"),
        *("A retired botanist", "The irrigation computer", "The woman from the ticket desk"),
    ),
    deeds=(
        *("swept dry leaves into a corner", "opened the upper windows a little", "sat on the bench by the pond"),
        *("repotted a few geraniums", "made a strange noise", "sketched a leaf in pencil"),
        *("left muddy footprints on the tiles", "carried a watering can back and forth", "asked about the tall bamboo"),
    ),
    circumstances=(
        *(
            "after the frost of last week",
            "near the banana plants",
            "in spite of the heat",
            "shortly before closing time",
        ),
        *(
            "as the schedule suggests",
            "without anyone noticing",
            "while the pump was running",
            "on the way to the compost",
        ),
    ),
)

WORLDS = {world.name: world for world in (HARBOUR, FESTIVAL, GREENHOUSE)}

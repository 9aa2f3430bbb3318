"""A hotel's night porter: numbers that are mentioned in passing, in long sentences, among short ones about nothing."""

from intentkv.evals.records import Family

NIGHT_PORTER = Family(
    name="night-porter",
    system=(
        "You are the assistant of a hotel. Answer each question from the porter's notes that the tool read out, in one "
        "short sentence, and copy names and codes exactly."
    ),
    tool="read_notes",
    action="call_porter",
    style="prose",
    titles=(
        "notes of the first night",
        "notes of the second night",
        "notes of the third night",
        "notes of the fourth night",
        "notes of the fifth night",
        "notes of the sixth night",
        "notes of the seventh night",
        "notes of the eighth night",
    ),
    labels=(
        "door code",
        "room number",
        "phone extension",
        "locker number",
        "meter reading",
        "key number",
        "safe code",
        "parking number",
        "alarm code",
        "invoice number",
        "serial number",
        "guest number",
        "ticket number",
        "permit number",
        "tank level",
    ),
    objects=(
        *("bridal suite", "wine cellar", "roof garden", "laundry lift", "old ballroom", "staff kitchen"),
        *("billiard room", "winter garden", "north tower", "coat room", "bicycle shed", "boiler house"),
        *("tea pavilion", "grand piano", "rowing boat", "swimming pool", "linen store", "smoking lounge"),
        *("garden gate", "silver cabinet", "library stairs", "music salon", "barber shop", "ice machine"),
        *("flower shop", "horse stable", "sauna hut", "tennis court", "coffee bar", "goods entrance"),
        *("theatre box", "lake terrace", "breakfast hall", "luggage van", "chapel organ", "fire escape"),
    ),
    statements=(
        (
            "The {what} is {value}, which the porter wrote down before his supper for whoever would come after "
            "him, and it has been so ever since the spring."
        ),
        (
            "The {what} is {value}, and not what the leaflet says, as all of the guests agreed in the end after "
            "some confusion at the desk around midnight."
        ),
        (
            "The {what} is {value}, and the manager, who had come down to look for a newspaper, asked that "
            "everybody who works at night should know it."
        ),
        (
            "The {what} is {value}, as the housekeeper mentioned over a cup of tea while the rain was beating "
            "against the windows and nobody wanted to leave."
        ),
        (
            "The {what} is {value} according to a note that a man from the company left on the counter when he "
            "came by shortly before closing time."
        ),
        (
            "The {what} is {value}, as the porter told the lady from the third floor when she asked for the "
            "fourth time in one and the same evening."
        ),
        (
            "The {what} is {value}, at least until the end of the season, which is not easy to remember among "
            "all the things that one has to keep in mind."
        ),
        (
            "The {what} is {value} from this week on, according to the letter that arrived with the evening post "
            "and which is now in the drawer under the bell."
        ),
    ),
    filler="{} {}.",
    filler_times=3,
    openings=(
        "The lift",
        "The cook",
        "A guest",
        "The cat",
        "The maid",
        "A taxi",
        "The waiter",
        "The clock",
        "The gardener",
        "A child",
        "The radio",
        "The manager",
        "A bell",
        "The dog",
    ),
    actions=(
        "was late again",
        "went home early",
        "made no noise",
        "stayed in the hall",
        "came back at two",
        "was very quiet",
        "waited by the door",
        "did not wake up",
        "left before dawn",
        "was seen outside",
        "needed a rest",
        "kept everybody awake",
        "stopped for a while",
        "was not needed",
        "looked rather tired",
        "went up and down",
        "came in from the rain",
        "was soon forgotten",
    ),
    reasons=(),
    closings=(),
    details=(
        "{person} paid {amount} for {code}.",
        "{person} left parcel {code}.",
        "Bill {code} of {amount} went to {person}.",
        "{person} lost {amount} at cards.",
        "Taxi {code} cost {person} {amount}.",
        "{person} signed for {code}.",
    ),
)

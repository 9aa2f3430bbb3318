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
            "Before he went to have his supper the porter wrote down for whoever would come after him that the {what} is {value}, "
            "as it has been ever since the spring."
        ),
        (
            "There was some confusion at the desk around midnight, but in the end all of the guests agreed that the {what} is "
            "{value} and not what the leaflet says."
        ),
        (
            "The manager, who had come down to look for a newspaper, asked that everybody who works at night should know that the "
            "{what} is {value}."
        ),
        (
            "While the rain was beating against the windows, the housekeeper mentioned over a cup of tea that the {what} is {value}, "
            "which the others had never heard."
        ),
        (
            "A man from the company came by shortly before closing time and left a note on the counter which says that the {what} "
            "is {value}."
        ),
        (
            "When the lady from the third floor asked for the fourth time in one evening, the porter looked it up and told her that "
            "the {what} is {value}."
        ),
        (
            "It is not easy to remember among all the things that one has to keep in mind, but the {what} is {value}, at least until "
            "the end of the season."
        ),
        (
            "According to the letter that arrived with the evening post, and which is now in the drawer under the bell, the {what} "
            "is {value} from this week on."
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

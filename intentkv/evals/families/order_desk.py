"""The order desk of a furniture warehouse: who collects what, with which code, from where."""

from intentkv.evals.sessions import Family, Kind, amount, code, person

ORDER_DESK = Family(
    name="order-desk",
    system=(
        "You are the assistant of a warehouse order desk. Answer each question from the records that the tool loaded, "
        "in one short sentence, and copy names, codes and amounts exactly."
    ),
    tool="load_record",
    titles=(
        "morning intake ledger",
        "loading bay journal",
        "customer call notes",
        "returns counter report",
        "evening dispatch summary",
        "weekend handover sheet",
        "carrier exchange file",
        "stock count protocol",
    ),
    subjects=tuple(
        "Mira Voss|Tobias Lindqvist|Amara Osei|Henrik Dahl|Priya Raman|Lucia Ferrante|Yusuf Demir|Clara Whitfield|"
        "Mateo Salgado|Ingrid Solberg|Kofi Mensah|Nadia Petrova|Oscar Brandt|Leila Haddad|Samuel Okoro|Greta Nyman|"
        "Rafael Pinto|Hana Kobayashi|Dmitri Orlov|Elena Vargas|Jonas Keller|Aisha Bello|Viktor Szabo|Camille Laurent|"
        "Anton Brekke|Sofia Marin|Ravi Chandran|Freya Holm|Pedro Alvim|Noor Rahman|Stefan Kovac|Bridget Malone|"
        "Tariq Aziz|Monika Wolf|Declan Byrne|Yara Costa|Emil Strand|Zofia Nowak|Hugo Bernard|Keiko Tanaka".split("|")
    ),
    kinds=(
        Kind("The pickup code for {subject} is {value}.", "What is the pickup code for {subject}?", code),
        Kind("The deposit paid by {subject} was {value}.", "How much was the deposit paid by {subject}?", amount),
        Kind("The crate of {subject} has the label {value}.", "What label does the crate of {subject} have?", code),
        Kind("The driver assigned to {subject} is {value}.", "Who is the driver assigned to {subject}?", person),
    ),
    openings=(
        "The forklift operator",
        "A customer at the counter",
        "The night supervisor",
        "One of the drivers",
        "The packing team",
        "The new trainee",
        "A courier from the coast",
        "The inventory clerk",
        "The carpenter downstairs",
        "Somebody from accounting",
        "The gate guard",
        "A visitor with a trolley",
        "The upholstery workshop",
        "The shift leader",
    ),
    actions=(
        "moved several pallets of oak shelving to the far wall",
        "checked the straps on the tall wardrobes twice",
        "asked for the invoice to be printed on thicker paper",
        "left a stack of empty boxes beside the ramp",
        "wrapped the glass tabletops in two layers of felt",
        "swept the aisle between the sofas and the lamps",
        "compared the paper list with the handheld scanner",
        "waited near the freight lift for almost half an hour",
        "set aside a damaged armchair for the repair bench",
        "rearranged the garden benches by colour and size",
        "complained about the draught at the side entrance",
        "borrowed the long ladder from the showroom",
        "counted the remaining bags of upholstery tacks",
        "put a handwritten note on the door of the office",
        "carried the dining chairs up the stairs one at a time",
        "turned the radio down and opened the shutters",
        "photographed the scratches on a walnut dresser",
        "sorted the spare keys into the small drawers",
    ),
    reasons=(
        "because the usual place was still wet from cleaning",
        "since the large truck had not come back yet",
        "while the others were having their lunch",
        "after the second delivery of the day arrived early",
        "as the label printer was being serviced",
        "before anyone had opened the main gate",
        "although the schedule said something different",
        "because two colleagues had called in sick",
        "when the rain started to come through the awning",
        "since the order had been changed by telephone",
        "while a school class was visiting the building",
        "because the floor lamp display needed more room",
    ),
    closings=(
        "and nobody raised an objection",
        "which took rather longer than planned",
        "so the afternoon began with a short delay",
        "and the matter was settled without a form",
        "though it will have to be repeated next week",
        "and the manager thanked everybody involved",
        "which left the aisle clear for the evening",
        "so a second pair of hands was welcome",
        "and the result was noted on the whiteboard",
        "though the weather made it less pleasant",
        "and everything was back in place by closing time",
        "which surprised those who had seen it last year",
    ),
)

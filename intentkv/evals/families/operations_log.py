"""The operations room of a small hosting company: which service got what, who is on call, what a change costs."""

from intentkv.evals.sessions import Family, Kind, amount, code, person

OPERATIONS_LOG = Family(
    name="operations-log",
    system=(
        "You are the assistant of an operations room. Answer each question from the logs that the tool fetched, in one "
        "short sentence, and copy names, codes and amounts exactly."
    ),
    tool="fetch_log",
    titles=(
        "overnight incident log",
        "deployment journal",
        "network change notes",
        "storage maintenance report",
        "handover summary",
        "capacity review file",
        "security rounds log",
        "backup verification sheet",
    ),
    subjects=tuple(
        f"the {word} service"
        for word in (
            "checkout|billing|search|thumbnail|mailer|catalog|session|gateway|ledger|replica|scheduler|webhook|archive|"
            "invoice|geocoding|telemetry|avatar|export|sitemap|voucher|inbox|translation|payout|audit|calendar|"
            "recommendation|upload|heartbeat|consent|pricing|routing|reporting|feedback|newsletter|directory|quota|"
            "streaming|profile|wishlist|survey"
        ).split("|")
    ),
    kinds=(
        Kind("The rollback tag for {subject} is {value}.", "What is the rollback tag for {subject}?", code),
        Kind("The engineer on call for {subject} is {value}.", "Who is the engineer on call for {subject}?", person),
        Kind("The monthly cost of {subject} is {value}.", "What is the monthly cost of {subject}?", amount),
        Kind("The rack that hosts {subject} is {value}.", "Which rack hosts {subject}?", code),
    ),
    openings=(
        "The duty engineer",
        "A colleague from the database group",
        "The monitoring dashboard",
        "The network team",
        "An automatic job",
        "The vendor's technician",
        "The release manager",
        "Someone in the support channel",
        "The storage controller",
        "A contractor on site",
        "The second shift",
        "The load balancer",
        "The facilities desk",
        "A junior administrator",
    ),
    actions=(
        "restarted a stuck worker without losing any requests",
        "raised the alert threshold for disk latency a little",
        "replaced a fan in the third row of cabinets",
        "rotated the old access logs to the cold store",
        "compared the configuration with last week's copy",
        "reported a short spike in failed logins",
        "drained one node and put it back an hour later",
        "updated the runbook with two missing steps",
        "cleaned up temporary files left by the importer",
        "traced a slow query to a forgotten index",
        "reseated the cable of an uplink that was flapping",
        "confirmed that the snapshot could be restored",
        "silenced a noisy alarm until the end of the shift",
        "moved the test cluster behind the new firewall",
        "rejected a change request for lack of a plan",
        "measured the temperature at the end of the cold aisle",
        "renewed a certificate a month before its expiry",
        "opened a ticket about clock drift on old machines",
    ),
    reasons=(
        "because the previous attempt had timed out",
        "while traffic was at its lowest point of the night",
        "after a customer mentioned it in the forum",
        "since the dashboard had turned yellow twice",
        "as agreed in the planning meeting on Monday",
        "before the weekly freeze came into force",
        "although nobody had asked for it explicitly",
        "because the spare part had finally been delivered",
        "when the generator test was already over",
        "while the video call with the vendor went on",
        "since the documentation described it differently",
        "after comparing notes with the day shift",
    ),
    closings=(
        "and the graphs went back to normal",
        "which was recorded for the next review",
        "so no further action is planned",
        "and the on-site visit could be cancelled",
        "though the root cause is still open",
        "and everybody was informed by mail",
        "which cost about twenty minutes of sleep",
        "so the queue emptied before breakfast",
        "and a follow-up was put in the calendar",
        "though users did not notice anything",
        "and the checklist was signed off",
        "which matched what the drill had shown",
    ),
)

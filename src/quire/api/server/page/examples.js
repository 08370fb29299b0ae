// What an empty chat offers.

export const QUESTIONS = [
  "Explain what a page table is, in three sentences.",
  "Write a short poem about a library at night.",
];

const DOCUMENT = `The lighthouse of Anholm stands on a rock two miles off the coast. It was built in 1871 by
the engineer Clara Dunmore, after the winter in which eleven ships were lost there. The tower is forty-one
metres high and has two hundred and four steps. Its lamp burned rape oil at first, then paraffin, and from
1926 electric light. Three keepers lived there at a time, with a dog called Captain and a goat that nobody
had brought. In the great storm of 1902 the sea broke the lower windows, and the keepers kept the lamp alight
for five days without relief. The longest fog lasted as long. The last keeper, Johan Brandt, left in 1984,
when the light was made automatic; he took the logbooks with him and gave them to the school at Anholm, where
the children read one page aloud every morning.`;

/** Several questions about one text, asked at once: they share the text's blocks. */
export const SHARED = {
  system: `Answer in one sentence, from this text only.\n\n${DOCUMENT}`,
  questions: [
    "Who built the lighthouse?",
    "How high is the tower?",
    "What was the dog called?",
    "When did the last keeper leave?",
    "What happened in 1902?",
    "What do the children read?",
  ],
};

// What went wrong, and what to do, in sentences.

/** {what, advice, isKey, isDown}: the sentence of the server, ours about the way out, and whether a key or the server is
 * what is missing. */
export function adviceOn(error) {
  const what = error.message.replace(/([^.!?…])$/, "$1.");
  const told = (advice, more = {}) => ({ what: what.charAt(0).toUpperCase() + what.slice(1), advice, isKey: false, isDown: false, ...more });
  switch (error.status) {
    case 401:
      return told("Give a key of this server and send again.", { isKey: true });
    case 403:
      return told("Use another key (Settings).", { isKey: true });
    case 413:
      return told("Send less text, or fewer files.");
    case 429:
      return told(`Try again in ${error.retryAfter ?? "a few"}\u00a0s.`, { what: `The server is busy: ${error.message}.` });
    case 503:
      return told("Try again when the state above says “ready”.", { isDown: true });
    case 504:
      return told("Try again, or ask for a shorter answer.");
    case 0:
      return told("What came so far is kept: continue it, or try again.");
    case -1:
      return told("It is asked again every two seconds; your message is kept.", { isDown: true });
    case 400:
    case 422:
      return told(adviceOnField(error));
    default:
      return told(!(error.status < 500) ? "Try again; the server's log says more." : "Correct it and send again.");
  }
}

function adviceOnField({ param, message }) {
  if (/context|max_model_len/.test(message) && ["messages", "max_tokens", null].includes(param)) {
    return "The conversation is too long for this model: start a new chat, or edit an earlier message to branch off there.";
  }
  return param && param !== "messages" ? `Change “${param}” in the settings and send again.` : "Change the message and send again.";
}

// Lints the pages' scripts: npx eslint@9 coa_jax/report/static
const browser = [
  'AbortController', 'TextDecoder', 'URLSearchParams', 'clearTimeout', 'document',
  'fetch', 'history', 'innerHeight', 'location', 'performance', 'scrollTo', 'scrollY',
  'setTimeout', 'window',
];
const markup = ['innerHTML', 'outerHTML', 'insertAdjacentHTML', 'write', 'setHTMLUnsafe'];

export default [{
  files: ['coa_jax/report/static/*.js'],
  languageOptions: {
    sourceType: 'script',
    ecmaVersion: 2022,
    globals: Object.fromEntries(browser.map(name => [name, 'readonly'])),
  },
  rules: {
    'array-callback-return': 'error',
    'consistent-return': 'error',
    'eqeqeq': 'error',
    'max-len': ['error', 88],
    'no-constant-condition': 'error',
    'no-dupe-else-if': 'error',
    'no-dupe-keys': 'error',
    'no-eval': 'error',
    'no-fallthrough': 'error',
    'no-implied-eval': 'error',
    'no-new-func': 'error',
    'no-redeclare': 'error',
    // Trajectories are hostile: text becomes text nodes, never markup.
    'no-restricted-properties': ['error', ...markup.map(property => ({property}))],
    'no-self-compare': 'error',
    'no-shadow': 'error',
    'no-undef': 'error',
    'no-unreachable': 'error',
    'no-unused-expressions': 'error',
    'no-unused-vars': 'error',
    'no-use-before-define': ['error', {functions: false, variables: false}],
    'no-var': 'error',
    'prefer-const': 'error',
    'semi': 'error',
    'strict': ['error', 'global'],
  },
}];
